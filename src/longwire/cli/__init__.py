"""The longwire command: one file per subcommand."""

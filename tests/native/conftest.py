"""Every test that asks for `ggml` runs once per engine."""

from __future__ import annotations

import pytest

from support.ggml import ENGINES, Ggml, open_ggml


@pytest.fixture(params=ENGINES)
def ggml(request: pytest.FixtureRequest) -> Ggml:
    return open_ggml(request.param)

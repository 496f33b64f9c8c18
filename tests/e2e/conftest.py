"""The real small model, fetched once into the user's cache."""

from pathlib import Path

import pytest

from anabranch.runtime.models_cache import default_model_path


@pytest.fixture(scope="session")
def model_path() -> Path:
    return default_model_path()

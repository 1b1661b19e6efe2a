"""What is missing, too old or untested is said; needs no extra."""

import logging

import pytest

from inshrink_core.errors import InputError, MissingExtraError
from inshrink_core.integrations.versions import require


def test_a_library_that_is_not_installed_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"inshrink\[hf\]"):
        require("no_such_package", extra="hf", oldest="1.0", tested="2.0")


def test_a_library_that_is_too_old_is_refused():
    with pytest.raises(InputError, match="too old"):
        require("packaging", extra="hf", oldest="9999.0", tested="9999.0")


def test_a_library_that_is_newer_than_those_tested_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        require("packaging", extra="hf", oldest="1.0", tested="2.0")
    assert "the last one tested" in caplog.text

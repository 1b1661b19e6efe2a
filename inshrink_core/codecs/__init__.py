"""Codecs, each in a separate module or package; `inshrink_core.codec` defines their interface."""

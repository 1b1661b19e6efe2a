"""Which parameter each numbered state of an optimizer belongs to: by order, by values, by code."""

"""Every codec on one run: the largest ratio that keeps a bound, measured, not interpolated."""

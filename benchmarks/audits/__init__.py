"""Comparisons with other engines and kernels, and campaigns that take hours. Run by hand; not in the wheel."""

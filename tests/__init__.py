"""Tests of llamaspec."""

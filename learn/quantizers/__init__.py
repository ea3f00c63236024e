"""All weight quantizers of `reference/quantizers/` with one interface, for the gallery and the X-ray page."""

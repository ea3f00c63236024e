"""All quantizers of weights in `reference/quantizers/`, with one interface, for the gallery and the X-ray page."""

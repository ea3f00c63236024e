"""Every quantizer of weights in `reference/quantizers/`, in one form: for the gallery and for the X-ray page."""

"""Parts that suites, gates and audits share."""

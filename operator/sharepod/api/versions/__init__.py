"""Versions of the API: which a kind has, conversion between them without loss, and answers to ConversionReviews."""

"""Redundant memory pages: GF(2^8), Reed-Solomon matrices and codecs, page checksums."""

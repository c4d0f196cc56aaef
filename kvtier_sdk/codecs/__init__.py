"""The codecs, which need the extra ``seal``, and the coders of option ``compress``."""

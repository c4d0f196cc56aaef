"""Tells whether the core's modules run as compiled code from a wheel, or as pure Python."""

#: True if this module, and with it the manager and the policies, runs as compiled code.
IS_COMPILED = not __file__.endswith(".py")

CORE = "compiled" if IS_COMPILED else "pure Python"

"""The SDK's codecs. Each needs the extra ``seal``."""

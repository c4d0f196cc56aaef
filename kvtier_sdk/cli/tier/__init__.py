"""The ``kvtier tier`` commands. They work while engines use the tiers."""

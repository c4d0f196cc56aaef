"""The commands of ``kvtier tier``. They work while engines use the tiers."""

"""The host pool: the memory of the primary tier, in one process or shared by several."""

from kvtier_sdk.pool.host_pool import HostPool as HostPool
from kvtier_sdk.pool.layout import PoolLayout as PoolLayout
from kvtier_sdk.pool.layout import PoolMemory as PoolMemory

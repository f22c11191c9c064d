"""What the application asks of Ray Serve, read from the application itself; nothing is started."""

from __future__ import annotations

import pytest
from serving import TINY

from cluster.config import default_config
from cluster.errors import ConfigError, StartError
from cluster.scaling.serve_client import deployment_name
from cluster.serve.app import build_application
from cluster.serve.capacity import ENGINE_CORE_CPUS
from cluster.serve.joined_ray import find_target
from cluster.serve.launcher import check_hosts


def test_each_pool_is_a_deployment_of_placement_groups_below_the_gateway() -> None:
    config = default_config(TINY, prefill=2, decode=3)
    application = build_application(config, {"prefill": 0.25, "decode": 0.5})
    assert application._bound_deployment.name == "Gateway"
    pools = [pool._bound_deployment for pool in application._bound_deployment.init_args[3:]]
    assert [pool.name for pool in pools] == ["Pool-prefill", "Pool-decode"]
    for pool, num_replicas, cpus in zip(pools, (2, 3), (0.25, 0.5), strict=True):
        settings = pool._deployment_config
        assert settings.num_replicas == num_replicas
        assert settings.health_check_period_s == 2.0
        assert settings.health_check_timeout_s == 5.0
        assert settings.graceful_shutdown_timeout_s > config.pools[0].drain_s
        assert pool._replica_config.placement_group_bundles == [{"CPU": ENGINE_CORE_CPUS}, {"CPU": cpus}]
        assert pool._replica_config.placement_group_strategy == "STRICT_PACK"


def test_deployment_names_are_what_operators_scale() -> None:
    assert deployment_name("decode") == "Pool-decode"


def test_several_gateways_of_one_host_need_ports_of_their_own() -> None:
    config = default_config(TINY, port=8780)
    two = config.model_copy(update={"gateway": config.gateway.model_copy(update={"replicas": 2})})
    with pytest.raises(ConfigError, match=r"gateway\.port: 2 gateways on 1 Ray nodes"):
        check_hosts(two, 1)
    check_hosts(config, 1)
    free = two.model_copy(update={"gateway": two.gateway.at(None, 0)})
    check_hosts(free, 1)


def test_loopback_does_not_reach_other_hosts() -> None:
    config = default_config(TINY)
    far = config.transfer.model_copy(update={"data_host": "127.0.0.1"})
    with pytest.raises(ConfigError, match=r"transfer\.data_host: 127\.0\.0\.1"):
        check_hosts(config.model_copy(update={"transfer": far}), 2)


@pytest.mark.parametrize("address", ["nowhere", "host:", ":", "127.0.0.1:99999"])
def test_a_ray_address_must_be_one(address: str) -> None:
    with pytest.raises(StartError, match="Ray"):
        find_target(address, [], {})

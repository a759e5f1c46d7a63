"""Third parties of a gateway, from its configuration."""

from sealane.daemon.config import ThirdPartyConfig
from sealane.daemon.gateway.third_party_link import ThirdParty
from sealane.daemon.nvme.host_secrets import read_dhchap
from sealane.daemon.runtime.listeners import split_address
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.handshake import Digests


def third_party_of(config: ThirdPartyConfig) -> ThirdParty:
    """Read a third party's key files; UsageError in one line."""
    key = f"gateway.third_party {config.name}"
    secret = read_dhchap(config.dhchap_key_file, f"{key} dhchap_key_file")
    controller_secret = read_dhchap(
        config.dhchap_controller_key_file, f"{key} dhchap_controller_key_file"
    )
    traddr, trsvcid = split_address(config.address)
    return ThirdParty(
        name=config.name,
        traddr=traddr,
        trsvcid=trsvcid,
        subsystem_nqn=config.subsystem_nqn,
        namespace_id=config.namespace_id,
        credentials=None
        if secret is None
        else Credentials(secret=secret, controller_secret=controller_secret),
        digests=Digests(header=config.digests, data=config.digests),
    )

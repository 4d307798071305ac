"""The address of this node: loopback where all ranks are here, else the one under which other nodes reach it."""

import platform
import socket

LOOPBACK = "127.0.0.1"


def own_address():
    """This host's address as other nodes see it."""
    address = socket.gethostbyname(platform.node())
    if not address.startswith("127."):
        return address
    # The host's name resolves to loopback, as Debian sets it up. Which address would a packet to elsewhere carry?
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connect() on such a socket sends nothing
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return address
        return probe.getsockname()[0]

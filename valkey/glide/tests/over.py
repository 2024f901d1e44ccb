"""A plugin of pytest: clients that GLIDE's own tests make without a transport use that of GLIDE_TRANSPORT."""

import os

import glide_shared.config as config

TRANSPORT = config.Transport[os.environ["GLIDE_TRANSPORT"]]
made = config.BaseClientConfiguration._create_a_protobuf_conn_request


def over(self, cluster_mode=False):
    request = made(self, cluster_mode)
    unix = any(address.unix_socket_path is not None for address in self.addresses)
    if not self.use_tls and not unix:
        request.transport = TRANSPORT.value
    return request


config.BaseClientConfiguration._create_a_protobuf_conn_request = over

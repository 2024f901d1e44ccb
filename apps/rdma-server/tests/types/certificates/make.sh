#!/bin/sh
# Makes the certificates of the TLS tests: an authority, and a server and a client that it vouches for. Of no use elsewhere.
set -eu
cd "$(dirname "$0")"
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1.key.pem"; }
key authority
openssl req -x509 -new -key authority.key.pem -days 36500 -subj '/CN=rdma-conn tests' -out authority.pem \
    -addext 'basicConstraints=critical,CA:TRUE'
for name in server client; do
    key "$name"
    printf 'subjectAltName=DNS:%s.test\nbasicConstraints=CA:FALSE\n' "$name" >extensions
    openssl req -new -key "$name.key.pem" -subj "/CN=$name.test" |
        openssl x509 -req -CA authority.pem -CAkey authority.key.pem -CAcreateserial -days 36500 \
            -extfile extensions -out "$name.pem"
done
rm -f extensions authority.srl authority.key.pem

#!/bin/sh
# Makes the certificates of the tests: an authority, and a server on localhost that it vouches for. Of no use elsewhere.
set -eu
cd "$(dirname "$0")"
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1.key.pem"; }
key authority
openssl req -x509 -new -key authority.key.pem -days 36500 -subj '/CN=rdma-bridge tests' -out authority.pem \
    -addext 'basicConstraints=critical,CA:TRUE'
key server
printf 'subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n' >extensions
openssl req -new -key server.key.pem -subj '/CN=localhost' |
    openssl x509 -req -CA authority.pem -CAkey authority.key.pem -CAcreateserial -days 36500 -extfile extensions -out server.pem
rm -f extensions authority.srl authority.key.pem

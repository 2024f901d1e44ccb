//! Authorisation to pull: both sides prove that they have the same secret, without sending it.
//!
//! Each side's code is an HMAC-SHA-256 over both nonces, the snapshot and, for the reader, the
//! address that it will connect from. The sides' codes differ in their first byte, so that neither
//! can be sent back. Without a secret both sides prove the empty one: there is only one way.
//!
//! This authenticates the beginning of a session, and no more. RDMA has neither encryption nor
//! integrity against an attacker. An attacker on the path can read and change bytes. One that
//! guesses an rkey from a queue pair in the same protection domain can read the memory. See
//! `spec/snapshot.md`, Security.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::wire::{Challenge, Digest, Hello, Proof};

/// A shared secret. It is never printed.
#[derive(Clone, Default)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Returns the secret in these bytes. An empty one stands for none.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    fn mac(&self, role: u8, hello: &Hello, challenge: &Challenge) -> Hmac<Sha256> {
        let Ok(mac) = Hmac::<Sha256>::new_from_slice(&self.0) else {
            unreachable!("an HMAC takes keys of any length")
        };
        mac.chain_update([role])
            .chain_update(hello.nonce)
            .chain_update(challenge.nonce)
            .chain_update(challenge.snapshot)
            .chain_update(challenge.data_port.to_bytes())
    }

    pub(crate) fn reader_code(&self, hello: &Hello, challenge: &Challenge, proof: &Proof) -> Digest {
        self.reader_mac(hello, challenge, proof).finalize().into_bytes().into()
    }

    fn reader_mac(&self, hello: &Hello, challenge: &Challenge, proof: &Proof) -> Hmac<Sha256> {
        self.mac(b'R', hello, challenge).chain_update(proof.address).chain_update(proof.port.to_bytes())
    }

    /// Returns whether the reader has the secret (VS-AUTH-001). Takes constant time.
    pub(crate) fn is_readers(&self, hello: &Hello, challenge: &Challenge, proof: &Proof) -> bool {
        self.reader_mac(hello, challenge, proof).verify_slice(&proof.code).is_ok()
    }

    pub(crate) fn publisher_code(&self, hello: &Hello, challenge: &Challenge) -> Digest {
        self.mac(b'P', hello, challenge).finalize().into_bytes().into()
    }

    /// Returns whether the publisher has the secret (VS-AUTH-002). Takes constant time.
    pub(crate) fn is_publishers(&self, hello: &Hello, challenge: &Challenge, code: &Digest) -> bool {
        self.mac(b'P', hello, challenge).verify_slice(code).is_ok()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Secret(none)" } else { "Secret(..)" })
    }
}

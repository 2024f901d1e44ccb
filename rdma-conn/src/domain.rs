//! The protection domain of a connection, which other connections to the same server may share.

use std::sync::Arc;

use rdma_backend::{Backend, DeviceKey, Identifier};

use crate::error::Error;

/// A protection domain: memory that is registered in it serves every connection in it. Each connection has one of its own, unless
/// its program gives it that of another ([`Stream::connect_in`](crate::Stream::connect_in),
/// [`Endpoint::connect_in`](crate::Endpoint::connect_in)); accepted connections never share one.
///
/// A key opens a region to each peer of the domain (VR-SEC-002). A peer that guesses or is told the keys of another can write
/// to that one's windows, and to all memory that is registered to receive into, for as long as any connection of the domain lasts. So
/// a client shares a domain only between connections to one server that it trusts as one, such as several to the same
/// process: that server could write the same bytes through the connection that they belong to.
///
/// It is freed with the last connection and the last region in it.
pub struct ProtectionDomain<B: Backend>(Arc<Inner<B>>);

struct Inner<B: Backend> {
    domain: B::Domain,
    device: DeviceKey,
}

impl<B: Backend> ProtectionDomain<B> {
    /// Makes one on the device of `id`.
    pub(crate) fn create(id: &B::Identifier) -> Result<Self, Error> {
        let what = Error::backend("allocating a protection domain");
        let device = match id.device() {
            Ok(device) => device,
            Err(error) => return Err(what(error)),
        };
        Ok(Self(Arc::new(Inner { domain: id.create_domain().map_err(what)?, device })))
    }

    /// Checks that a connection on `id` can be in it.
    ///
    /// # Errors
    /// It is of another device.
    pub(crate) fn check(&self, id: &B::Identifier) -> Result<(), Error> {
        let device = id.device().map_err(Error::backend("asking for the device"))?;
        if device == self.0.device { Ok(()) } else { Err(Error::ForeignDomain) }
    }

    pub(crate) fn lower(&self) -> &B::Domain {
        &self.0.domain
    }
}

impl<B: Backend> Clone for ProtectionDomain<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: Backend> PartialEq for ProtectionDomain<B> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<B: Backend> Eq for ProtectionDomain<B> {}

impl<B: Backend> std::fmt::Debug for ProtectionDomain<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProtectionDomain").field("device", &self.0.device).finish_non_exhaustive()
    }
}

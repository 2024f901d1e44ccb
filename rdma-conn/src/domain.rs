use std::sync::Arc;

use rdma_backend::{Backend, DeviceKey, Identifier};

use crate::error::Error;

/// A protection domain. Memory registered in it serves every connection in it.
///
/// Each connection has its own, unless the program passes another's
/// ([`Stream::connect_in`](crate::Stream::connect_in),
/// [`Endpoint::connect_in`](crate::Endpoint::connect_in)). Accepted connections never share one.
///
/// A remote key (rkey) opens a region to each peer of the domain (VR-SEC-002). A peer that learns
/// or guesses the key of another connection can write to this side's windows of that connection.
/// It can also write to all memory registered to receive into. It can do so while any connection
/// of the domain exists. So share a domain only between connections
/// to one server that you trust as a whole, such as one process. Such a server gains nothing by the
/// key of another connection: it could write the same bytes through that connection.
///
/// The domain is freed with its last connection and its last region.
pub struct ProtectionDomain<B: Backend>(Arc<Inner<B>>);

struct Inner<B: Backend> {
    domain: B::Domain,
    device: DeviceKey,
}

impl<B: Backend> ProtectionDomain<B> {
    pub(crate) fn create(id: &B::Identifier) -> Result<Self, Error> {
        let what = Error::backend("allocating a protection domain");
        let device = match id.device() {
            Ok(device) => device,
            Err(error) => return Err(what(error)),
        };
        Ok(Self(Arc::new(Inner { domain: id.create_domain().map_err(what)?, device })))
    }

    pub(crate) fn check(&self, id: &B::Identifier) -> Result<(), Error> {
        // The objects of a queue pair must be of one device.
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

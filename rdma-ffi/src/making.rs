//! Listeners, and the making of connections.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::time::Duration;

use rdma_conn::Error;

use crate::address::{Address, address};
use crate::endpoint::{Endpoint, Kind, connection, either, number_of, on, place};
use crate::error::{Code, Failed, Failure};
use crate::options::{Options, options};

/// Listens on a numeric address and a port; port 0 takes a free one. Connections that it accepts have these options; NULL for those of
/// `vkrdma_server_options`. An endpoint may have any number of listeners. Each new connection is told by VKRDMA_EVENT_OPENED.
///
/// VKRDMA_ADDRESS: no RDMA device has that address, or it is taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_listen(
    endpoint: Option<&Endpoint>,
    text: *const c_char,
    port: u16,
    accepted: *const Options,
    listener: Option<&mut MaybeUninit<u64>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        // SAFETY: the caller's promise.
        let (address, accepted) =
            unsafe { (address(text, port)?, options(accepted, rdma_conn::Options::server())?) };
        let listener = place(listener)?;
        let id = either!(&mut state.kind, side => side.endpoint.listen(address, accepted))?;
        listener.write(state.names.enter(id));
        Ok(())
    })
}

/// Tells the address of a listener, with its port.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_listener_address(
    endpoint: Option<&Endpoint>,
    listener: u64,
    address: Option<&mut MaybeUninit<Address>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let id = state.names.listener(listener)?;
        let found = either!(&state.kind, side => side.endpoint.local_addr(id));
        let found = found.ok_or_else(|| {
            Failure::Here(Code::VKRDMA_NO_SUCH_LISTENER, "the listener has no address any more".into())
        })?;
        place(address)?.write(Address::of(found));
        Ok(())
    })
}

/// Sets the options of the connections that a listener accepts from now on; NULL for those of `vkrdma_server_options`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_listener_set_options(
    endpoint: Option<&Endpoint>,
    listener: u64,
    accepted: *const Options,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let id = state.names.listener(listener)?;
        // SAFETY: the caller's promise.
        let accepted = unsafe { options(accepted, rdma_conn::Options::server()) }?;
        Ok(either!(&mut state.kind, side => side.endpoint.set_options(id, accepted))?)
    })
}

/// Listens no more: its address can be listened on anew. Connections that were accepted go on.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_listener_close(
    endpoint: Option<&Endpoint>,
    listener: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        state.names.listener(listener)?;
        if let Some(id) = state.names.remove(listener) {
            either!(&mut state.kind, side => side.endpoint.close_listener(id));
        }
        Ok(())
    })
}

/// Returns the error that kept a listener from accepting, after VKRDMA_EVENT_ACCEPT_FAILED, and VKRDMA_OK if there is none. A listener
/// whose device is gone returns it every time: close it.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_accept_error(
    endpoint: Option<&Endpoint>,
    listener: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let id = state.names.listener(listener)?;
        match either!(&mut state.kind, side => side.endpoint.take_accept_error(id)) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    })
}

/// Begins to connect to a numeric address and a port, from the address `source` unless that is NULL. It may take `timeout` microseconds.
/// VKRDMA_EVENT_OPENED follows, or VKRDMA_EVENT_ENDED if it fails, and `vkrdma_check` says why. `how` may be NULL, for what
/// `vkrdma_client_options` fills in.
///
/// The connection has an id at once, which is never 0. The id of a connection that is gone names no other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_connect(
    endpoint: Option<&Endpoint>,
    text: *const c_char,
    port: u16,
    source: *const c_char,
    timeout: u64,
    how: *const Options,
    connection: Option<&mut MaybeUninit<u64>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        // SAFETY: the caller's promise.
        let (peer, how) = unsafe { (address(text, port)?, options(how, rdma_conn::Options::client())?) };
        // SAFETY: the caller's promise.
        let local = if source.is_null() { None } else { Some(unsafe { address(source, 0) }?) };
        let connection = place(connection)?;
        let timeout = Duration::from_micros(timeout);
        let id = either!(&mut state.kind, side => side.endpoint.connect(peer, local, timeout, how))?;
        connection.write(number_of(id));
        Ok(())
    })
}

/// Begins to connect as `vkrdma_connect` does, in the protection domain of the connection `sibling` of the endpoint `other`, which may be
/// the same: memory that is registered for one serves both.
///
/// A peer of either connection that knows or guesses keys can write to the windows of both. So do this only for connections to one server
/// that is trusted as one. VKRDMA_EVENT_ENDED with VKRDMA_FOREIGN_DOMAIN follows if the way to the peer leads through another device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_connect_in_domain(
    endpoint: Option<&Endpoint>,
    other: Option<&Endpoint>,
    sibling: u64,
    text: *const c_char,
    port: u16,
    source: *const c_char,
    timeout: u64,
    how: *const Options,
    connection: Option<&mut MaybeUninit<u64>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    // One lock after the other: two threads that do this with the same endpoints never wait for each other.
    let (mut verbs, mut softsim) = (None, None);
    let mut failure = MaybeUninit::uninit();
    let found = on(other, Some(&mut failure), |state| {
        let id = self::connection(sibling)?;
        match &state.kind {
            Kind::Verbs(side) => verbs = side.endpoint.connection(id).map(|one| one.domain().clone()),
            Kind::SoftSim(side) => softsim = side.endpoint.connection(id).map(|one| one.domain().clone()),
        }
        if verbs.is_none() && softsim.is_none() { Err(Error::NoSuchConnection.into()) } else { Ok(()) }
    });
    if found != Code::VKRDMA_OK {
        if let Some(error) = error {
            *error = failure;
        }
        return found;
    }
    on(endpoint, error, |state| {
        // SAFETY: the caller's promise.
        let (peer, how) = unsafe { (address(text, port)?, options(how, rdma_conn::Options::client())?) };
        // SAFETY: the caller's promise.
        let local = if source.is_null() { None } else { Some(unsafe { address(source, 0) }?) };
        let connection = place(connection)?;
        let timeout = Duration::from_micros(timeout);
        let id = match (&mut state.kind, verbs, softsim) {
            (Kind::Verbs(side), Some(domain), _) => {
                side.endpoint.connect_in(&domain, peer, local, timeout, how)?
            }
            (Kind::SoftSim(side), _, Some(domain)) => {
                side.endpoint.connect_in(&domain, peer, local, timeout, how)?
            }
            _ => return Err(Error::ForeignDomain.into()),
        };
        connection.write(number_of(id));
        Ok(())
    })
}

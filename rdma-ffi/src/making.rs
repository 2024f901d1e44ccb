//! Listeners, and establishing connections.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::time::Duration;

use any_backend::{either, one_of};
use rdma_conn::{Error, ProtectionDomain};
use rdma_proto::Role;

use crate::address::{Address, address};
use crate::endpoint::{Endpoint, Kind, connection, number_of, on, place};
use crate::error::{Code, Failed, Failure};
use crate::options::{Options, defaults, options};

one_of!(enum Domain(ProtectionDomain));

/// Listens on a numeric address and a port; 0 chooses a free port. Accepted connections get these
/// options; NULL stands for those of `vkrdma_server_options`. An endpoint may have many listeners.
/// VKRDMA_EVENT_OPENED reports each new connection.
///
/// VKRDMA_ADDRESS: no RDMA device has the address, or it is in use.
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
            unsafe { (address(text, port)?, options(accepted, defaults(Role::Server))?) };
        let listener = place(listener)?;
        let id = either!(&mut state.kind, Kind(side) => side.endpoint.listen(address, accepted))?;
        listener.write(state.names.enter(id));
        Ok(())
    })
}

/// Returns the address and port of a listener.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_listener_address(
    endpoint: Option<&Endpoint>,
    listener: u64,
    address: Option<&mut MaybeUninit<Address>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let id = state.names.listener(listener)?;
        let found = either!(&state.kind, Kind(side) => side.endpoint.local_addr(id));
        let found = found.ok_or_else(|| {
            Failure::Here(Code::VKRDMA_NO_SUCH_LISTENER, "the listener has no address any more".into())
        })?;
        place(address)?.write(Address::of(found));
        Ok(())
    })
}

/// Sets the options of connections that a listener accepts later; NULL stands for those of
/// `vkrdma_server_options`.
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
        let accepted = unsafe { options(accepted, defaults(Role::Server)) }?;
        Ok(either!(&mut state.kind, Kind(side) => side.endpoint.set_options(id, accepted))?)
    })
}

/// Closes a listener; its address becomes free. Accepted connections stay open.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_listener_close(
    endpoint: Option<&Endpoint>,
    listener: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        state.names.listener(listener)?;
        if let Some(id) = state.names.remove(listener) {
            either!(&mut state.kind, Kind(side) => side.endpoint.close_listener(id));
        }
        Ok(())
    })
}

/// Returns the error that kept a listener from accepting, after VKRDMA_EVENT_ACCEPT_FAILED.
/// VKRDMA_OK: none. If its device was removed, every call returns that error: close the listener.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_accept_error(
    endpoint: Option<&Endpoint>,
    listener: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let id = state.names.listener(listener)?;
        match either!(&mut state.kind, Kind(side) => side.endpoint.take_accept_error(id)) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    })
}

/// Begins to connect to a numeric address and a port, from the address `source` unless NULL, within
/// `timeout` microseconds. VKRDMA_EVENT_OPENED follows, or VKRDMA_EVENT_ENDED, if connecting fails;
/// `vkrdma_check` returns the reason. NULL for `how`: the options of `vkrdma_client_options`.
///
/// The id is valid immediately and never 0. Ids are not reused.
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
        let (peer, how) = unsafe { (address(text, port)?, options(how, defaults(Role::Client))?) };
        // SAFETY: the caller's promise.
        let local = if source.is_null() { None } else { Some(unsafe { address(source, 0) }?) };
        let connection = place(connection)?;
        let timeout = Duration::from_micros(timeout);
        let id = either!(&mut state.kind, Kind(side) => side.endpoint.connect(peer, local, timeout, how))?;
        connection.write(number_of(id));
        Ok(())
    })
}

/// Connects like `vkrdma_connect`, in the protection domain of the connection `sibling` of the
/// endpoint `other`, which may be the same: both can use memory that is registered for one.
///
/// A peer of either that knows or guesses keys can write to the windows of both: use it only for
/// connections to the same server. If the route to the peer uses another device, VKRDMA_EVENT_ENDED
/// with VKRDMA_FOREIGN_DOMAIN follows.
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
    // One lock after the other: two threads with the same endpoints cannot deadlock.
    let mut domain = None;
    let mut failure = MaybeUninit::uninit();
    let found = on(other, Some(&mut failure), |state| {
        let id = self::connection(sibling)?;
        domain = Some(either!(&state.kind, Kind(side) -> Domain => {
            side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?.domain().clone()
        }));
        Ok(())
    });
    let Some(domain) = domain.filter(|_| found == Code::VKRDMA_OK) else {
        if let Some(error) = error {
            *error = failure;
        }
        return found;
    };
    on(endpoint, error, |state| {
        // SAFETY: the caller's promise.
        let (peer, how) = unsafe { (address(text, port)?, options(how, defaults(Role::Client))?) };
        // SAFETY: the caller's promise.
        let local = if source.is_null() { None } else { Some(unsafe { address(source, 0) }?) };
        let connection = place(connection)?;
        let timeout = Duration::from_micros(timeout);
        let id = either!(
            (&mut state.kind, domain),
            (Kind(side), Domain(domain)) => side.endpoint.connect_in(&domain, peer, local, timeout, how),
            _ => Err(Error::ForeignDomain)
        )?;
        connection.write(number_of(id));
        Ok(())
    })
}

//! Addresses, user data and the end of connections.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::time::Duration;

use any_backend::either;
use rdma_conn::{ConnectionId, Error};

use crate::address::Address;
use crate::endpoint::{Endpoint, Kind, State, on_connection, place};
use crate::error::{Code, Failed, Failure};

/// Sets the `data` of all later events of a connection: an address for the program, or NULL.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_set_data(
    endpoint: Option<&Endpoint>,
    connection: u64,
    data: *mut c_void,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, Kind(side) => side.endpoint.peer_addr(id));
        found.ok_or(Error::NoSuchConnection)?;
        state.names.set_data(id, data);
        Ok(())
    })
}

/// Returns the peer's address. For an accepted connection it is the one in the peer's request.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_peer_address(
    endpoint: Option<&Endpoint>,
    connection: u64,
    address: Option<&mut MaybeUninit<Address>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, Kind(side) => side.endpoint.peer_addr(id));
        place(address)?.write(Address::of(found.ok_or(Error::NoSuchConnection)?));
        Ok(())
    })
}

/// Returns this side's address. VKRDMA_NO_SUCH_CONNECTION: also until it is established.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_local_address(
    endpoint: Option<&Endpoint>,
    connection: u64,
    address: Option<&mut MaybeUninit<Address>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, Kind(side) => {
            side.endpoint.connection(id).and_then(|connection| connection.local_addr())
        });
        place(address)?.write(Address::of(found.ok_or(Error::NoSuchConnection)?));
        Ok(())
    })
}

/// Returns the error that ended a connection. VKRDMA_OK: it is open, or has ended in order.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_check(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        Ok(either!(&state.kind, Kind(side) => side.endpoint.check(id))?)
    })
}

/// Closes a connection gracefully: written bytes are delivered first, for at most `linger`
/// microseconds. VKRDMA_EVENT_ENDED follows; `vkrdma_closed` then tells whether all bytes were
/// delivered, and `vkrdma_abort` frees the connection.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_close(
    endpoint: Option<&Endpoint>,
    connection: u64,
    linger: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        Ok(either!(&mut state.kind, Kind(side) => side.endpoint.close(id, Duration::from_micros(linger)))?)
    })
}

/// Returns VKRDMA_OK if a closed connection has ended in order. VKRDMA_AGAIN: its last bytes are in
/// flight; VKRDMA_EVENT_ENDED follows. An error: not all bytes were delivered.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_closed(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, Kind(side) => side.endpoint.closed(id))?.ok_or(Failure::Again)
    })
}

/// Closes a connection like `vkrdma_close`, without further events, and frees it when it has ended.
/// Do not use its id after this call.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_abandon(
    endpoint: Option<&Endpoint>,
    connection: u64,
    linger: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, Kind(side) => side.endpoint.abandon(id, Duration::from_micros(linger)))?;
        state.forget(id);
        Ok(())
    })
}

/// Ends a connection immediately and frees it. Written bytes may be lost. Its id becomes invalid,
/// and no event of it follows.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_abort(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, abort)
}

pub(crate) fn abort(state: &mut State, id: ConnectionId) -> Result<(), Failure> {
    let found = either!(&state.kind, Kind(side) => side.endpoint.peer_addr(id));
    found.ok_or(Error::NoSuchConnection)?;
    either!(&mut state.kind, Kind(side) => side.endpoint.abort(id));
    state.forget(id);
    Ok(())
}

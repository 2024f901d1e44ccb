//! What belongs to the whole life of a connection: its addresses, its data, its end.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::time::Duration;

use rdma_conn::Error;

use crate::address::Address;
use crate::endpoint::{Endpoint, either, on_connection, place};
use crate::error::{Code, Failed, Failure};

/// Has the events of a connection carry `data`, an address that means something to the program. NULL for none.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_set_data(
    endpoint: Option<&Endpoint>,
    connection: u64,
    data: *mut c_void,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, side => side.endpoint.peer_addr(id));
        found.ok_or(Error::NoSuchConnection)?;
        state.names.set_data(id, data);
        Ok(())
    })
}

/// Tells the address of the peer. That of an accepted connection is what the peer's request said.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_peer_address(
    endpoint: Option<&Endpoint>,
    connection: u64,
    address: Option<&mut MaybeUninit<Address>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, side => side.endpoint.peer_addr(id));
        place(address)?.write(Address::of(found.ok_or(Error::NoSuchConnection)?));
        Ok(())
    })
}

/// Tells this side's address. VKRDMA_NO_SUCH_CONNECTION: one that is being made has none yet.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_local_address(
    endpoint: Option<&Endpoint>,
    connection: u64,
    address: Option<&mut MaybeUninit<Address>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, side => {
            side.endpoint.connection(id).and_then(|connection| connection.local_addr())
        });
        place(address)?.write(Address::of(found.ok_or(Error::NoSuchConnection)?));
        Ok(())
    })
}

/// Returns the error that ended a connection, and VKRDMA_OK if none did: it goes on, or has ended in order.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_check(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        Ok(either!(&state.kind, side => side.endpoint.check(id))?)
    })
}

/// Begins a graceful end: what was written is delivered first, for at most `linger` microseconds. VKRDMA_EVENT_ENDED follows, and
/// `vkrdma_closed` tells whether all of it arrived. `vkrdma_abort` forgets the connection then.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_close(
    endpoint: Option<&Endpoint>,
    connection: u64,
    linger: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        Ok(either!(&mut state.kind, side => side.endpoint.close(id, Duration::from_micros(linger)))?)
    })
}

/// Tells whether a connection that was closed has ended in order. VKRDMA_AGAIN: its last bytes are on their way, and
/// VKRDMA_EVENT_ENDED follows. An error: not everything arrived.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_closed(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, side => side.endpoint.closed(id))?.ok_or(Failure::Again)
    })
}

/// As `vkrdma_close`, for a program that does not want to hear of it: no event follows, and the connection is forgotten when it has ended.
/// Do not use its id any more.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_abandon(
    endpoint: Option<&Endpoint>,
    connection: u64,
    linger: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, side => side.endpoint.abandon(id, Duration::from_micros(linger)))?;
        state.forget(id);
        Ok(())
    })
}

/// Ends a connection at once, if it has not ended, and forgets it: what was written may be lost. Its id is nothing from then on, and no
/// event of it follows.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_abort(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, side => side.endpoint.peer_addr(id));
        found.ok_or(Error::NoSuchConnection)?;
        either!(&mut state.kind, side => side.endpoint.abort(id));
        state.forget(id);
        Ok(())
    })
}

//! Turns the source's `rdbcompression` off while the source forks for our snapshot.
//!
//! Compressing costs the source more than it saves on an RDMA network. No `REPLCONF capa` of Valkey
//! 9.1 asks for an RDB without it, so the setting itself is changed: from before `PSYNC` until
//! `+FULLRESYNC` has come. The source writes that line in the turn of its event loop in which it
//! forks, or when the fork already exists. It handles other clients' commands after that turn, so a
//! later `CONFIG SET` does not affect the child.

use std::io;

use super::Server;
use super::admin::Admin;
use super::setting::{Changed, Place, read};
use crate::wait::{Limit, Stop};

/// The setting.
pub(super) const NAME: &str = "rdbcompression";

/// Turns it off. Logs why and returns `None` if it stays on.
pub(super) fn turn_off(
    server: &Server,
    place: &Place,
    admin: &mut Admin,
    limit: &Limit,
    stop: &Stop,
) -> io::Result<Option<Changed>> {
    if read(NAME, admin, limit)?.is_some_and(|value| value != "yes") {
        return Ok(None);
    }
    Ok(match Changed::begin(place, NAME, "no", admin, limit, stop)? {
        Ok(changed) => Some(changed),
        Err(why) => {
            tracing::warn!("the RDB is as {server} makes it: {why}");
            None
        }
    })
}

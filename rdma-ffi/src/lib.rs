#![doc = include_str!("../README.md")]
#![allow(
    clippy::missing_safety_doc,
    reason = "these functions are for C: the header's rules are the contract of all of them, and their documentation is the header's"
)]

// The modules are in the order of the header.
mod error;

mod device;

mod options;

mod endpoint;

mod events;

mod shared;

mod making;

mod bytes;

mod memory;

mod loans;

mod ending;

mod counts;

mod address;
mod sized;

use std::ffi::c_char;

pub use address::{Address, VKRDMA_ADDRESS_TEXT};
pub use bytes::*;
pub use counts::*;
pub use device::{Device, vkrdma_device_free, vkrdma_softsim_open, vkrdma_verbs_open};
pub use ending::*;
pub use endpoint::{
    Endpoint, vkrdma_descriptor, vkrdma_endpoint_free, vkrdma_endpoint_new, vkrdma_endpoint_new_sharing,
    vkrdma_next_timeout, vkrdma_wait, vkrdma_wake,
};
pub use error::{Code, Failed, Fault, VKRDMA_ERROR_TEXT};
pub use events::{Event, EventKind, vkrdma_progress};
pub use loans::*;
pub use making::*;
pub use memory::*;
pub use options::{
    Limits, Options, VKRDMA_SETTINGS_TEXT, vkrdma_client_options, vkrdma_options_set, vkrdma_server_options,
};
pub use shared::*;

/// Returns the version of the library, for example `1.2.3`. Versions with the same first number are
/// compatible; while it is 0, those with the same second number.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_may_cross_threads() {
        fn crosses<T: Send + Sync>() {}
        crosses::<Device>();
        crosses::<Endpoint>();
        crosses::<SharedEvents>();
        crosses::<Buffer>();
        crosses::<Loans>();
    }
}

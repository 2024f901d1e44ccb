//! The tests that may share a process. `observed` has its own: it takes the one recorder of a
//! process.

mod allocations;
mod card;
mod connecting;
mod device;
mod endpoint;
mod framed;
mod given_up;
mod growing;
mod landing;
mod late;
mod shared;
mod strangers;
mod stream;
#[cfg(feature = "tokio")]
mod tokio;
mod turns;
mod waiting;
mod world;

//! The tests that may share a process. Three have their own: `allocations` counts allocations,
//! `crowd` counts descriptors, and `observed` takes the one recorder of a process.

mod card;
mod connecting;
mod device;
mod endpoint;
mod given_up;
mod landing;
mod late;
mod stream;
#[cfg(feature = "tokio")]
mod tokio;
mod waiting;
mod world;

//! The tests of this crate that may share a process. Three have processes of their own:
//! `allocations` counts those of its process, `crowd` counts its descriptors, and `observed` takes
//! the one recorder of a process.

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

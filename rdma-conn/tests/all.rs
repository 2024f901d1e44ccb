//! The tests of this crate that may share a process. Apart are `allocations`, which counts those of its process, `crowd`, which counts
//! its descriptors, and `observed`, which takes the one recorder of a process.

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

//! The fabric. Each topic is a module; a test that counts the threads of its process is a program of its own, `threads`.

mod common;

#[cfg(not(shuttle))]
mod copies;
#[cfg(not(shuttle))]
mod device;
#[cfg(not(shuttle))]
mod events;
#[cfg(shuttle)]
mod interleavings;
#[cfg(not(shuttle))]
mod real_time;
#[cfg(not(shuttle))]
mod virtual_time;

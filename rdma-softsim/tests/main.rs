//! The fabric, one module per topic. The test `threads` counts the threads of its process, so it is
//! a program of its own.

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

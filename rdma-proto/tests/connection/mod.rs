//! The connection machine, in scenarios of two machines, or of one and a scripted peer.

mod any_calls;
mod any_schedule;
mod credits;
mod end;
mod features;
mod handshake;
mod hostile;
mod limits;
mod regions;
mod signs_of_life;
mod stream;

//! The connection machine, told as stories of two of them, or of one and what a peer may do to it.

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

mod addresses;
mod admission;
mod harness;
mod memory;
mod replies;

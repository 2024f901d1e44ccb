//! The server: addresses, admission, delivery of replies, and the cost of clients.

mod addresses;
mod admission;
mod ends;
mod harness;
mod memory;
mod oracle;
mod replies;

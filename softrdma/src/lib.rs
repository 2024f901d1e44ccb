//! Soft RDMA for unmodified programs: a fabric between processes, behind the C ABI of librdmacm and
//! libibverbs.
//!
//! The program `softrdma` runs other programs with an RDMA device. [`fabric`] is the process that
//! owns the device's model (`rdma-softsim`), [`runtime`] decides where it lives and how it starts
//! and ends, [`doctor`] finds out whether it can run here. Programs load the library of the crate
//! `softrdma-abi`.
#![deny(unsafe_code)]

mod detached;
pub mod doctor;
pub mod fabric;
pub mod faults;
pub mod runtime;
pub mod view;

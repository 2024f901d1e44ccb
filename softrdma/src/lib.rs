//! Soft RDMA for programs as they are: a fabric between processes, behind the C ABI of librdmacm and libibverbs.
//!
//! The program `softrdma` runs other programs with an RDMA device. [`fabric`] is the process that owns the device's model
//! (`rdma-softsim`), [`runtime`] where it lives and how it starts and ends, [`doctor`] whether it can run
//! here. What programs load is the crate `softrdma-abi`.
#![deny(unsafe_code)]

pub mod doctor;
pub mod fabric;
pub mod faults;
pub mod runtime;
pub mod view;

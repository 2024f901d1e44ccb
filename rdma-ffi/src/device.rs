//! Devices, on which endpoints are created.

use std::ffi::c_char;
use std::mem::{MaybeUninit, forget};
use std::sync::OnceLock;

use rdma_backend::Backend;
use rdma_conn::Error;
use rdma_softsim::{Fabric, SoftSim};
use rdma_verbs::Verbs;

use crate::address;
use crate::error::{Code, Failed, Failure, call};
use crate::fork;

/// Access to RDMA devices. Created by `vkrdma_verbs_open` or `vkrdma_softsim_open`.
pub struct Device(pub(crate) Any);

pub(crate) enum Any {
    Verbs(Verbs),
    SoftSim(SoftSim),
}

/// Opens the machine's RDMA devices through librdmacm and libibverbs, which are loaded at run time.
///
/// VKRDMA_NO_DEVICE: no device, or a missing library. The text says what to install or load.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_verbs_open(
    device: Option<&mut MaybeUninit<*mut Device>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || {
        let verbs = Verbs::load().map_err(Error::backend("opening RDMA"))?;
        // Loading only finds the libraries; this finds a device.
        drop(verbs.event_channel().map_err(Error::backend("opening RDMA"))?);
        put(device, Any::Verbs(verbs))
    })
}

/// Opens a simulated device with a numeric address, for tests on machines without RDMA. The
/// simulated devices of a process are the only hosts of one network, so both sides of a connection
/// are in that process.
///
/// If another simulated device has the address, it moves to this one. VKRDMA_INVALID_ARGUMENT: the
/// text is not a numeric address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_softsim_open(
    address: *const c_char,
    device: Option<&mut MaybeUninit<*mut Device>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    static NETWORK: OnceLock<Fabric> = OnceLock::new();
    call(error, || {
        // SAFETY: the caller's promise.
        let address = unsafe { address::address(address, 0) }?;
        put(device, Any::SoftSim(NETWORK.get_or_init(Fabric::new).host(&[address.ip()])))
    })
}

/// Frees a device. Its endpoints remain usable. NULL is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_device_free(device: Option<Box<Device>>) {
    release(device);
}

fn put(device: Option<&mut MaybeUninit<*mut Device>>, any: Any) -> Result<(), Failure> {
    let device = device.ok_or(Failure::argument("the place for the device is null"))?;
    fork::watch();
    device.write(Box::into_raw(Box::new(Device(any))));
    Ok(())
}

/// Drops a handle, unless this process is a forked child.
pub(crate) fn release<T>(handle: Option<Box<T>>) {
    let Some(handle) = handle else { return };
    if fork::is_child() {
        // Freeing it would deregister the parent's memory and disconnect its connections.
        forget(handle);
    } else {
        let _: Code = call(None, || {
            drop(handle);
            Ok(())
        });
    }
}

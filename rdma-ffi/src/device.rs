//! Devices, on which endpoints are created.

use std::ffi::c_char;
use std::mem::{MaybeUninit, forget};

use any_backend::AnyBackend;

use crate::address;
use crate::error::{Code, Failed, Failure, call};

/// Access to RDMA devices. Created by `vkrdma_verbs_open` or `vkrdma_softsim_open`.
pub struct Device(pub(crate) AnyBackend);

/// Opens the machine's RDMA devices through librdmacm and libibverbs, which are loaded at run time.
///
/// VKRDMA_NO_DEVICE: no device, or a missing library. The text says what to install or load.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_verbs_open(
    device: Option<&mut MaybeUninit<*mut Device>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || put(device, AnyBackend::Verbs(any_backend::verbs()?)))
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
    call(error, || {
        // SAFETY: the caller's promise.
        let address = unsafe { address::address(address, 0) }?;
        put(device, AnyBackend::SoftSim(any_backend::softsim(address.ip())))
    })
}

/// Frees a device. Its endpoints remain usable. NULL is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_device_free(device: Option<Box<Device>>) {
    release(device);
}

fn put(device: Option<&mut MaybeUninit<*mut Device>>, backend: AnyBackend) -> Result<(), Failure> {
    let device = device.ok_or(Failure::argument("the place for the device is null"))?;
    device.write(Box::into_raw(Box::new(Device(backend))));
    Ok(())
}

/// Drops a handle, unless this process is a forked child.
pub(crate) fn release<T>(handle: Option<Box<T>>) {
    let Some(handle) = handle else { return };
    if rdma_process::is_child() {
        // Its parts may be in any state, if another thread of the parent had the lock.
        forget(handle);
    } else {
        let _: Code = call(None, || {
            drop(handle);
            Ok(())
        });
    }
}

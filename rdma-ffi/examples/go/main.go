// A client of a Valkey server over RDMA, by cgo: PING.
//
//	CGO_CFLAGS=$(pkg-config --cflags vkrdma) CGO_LDFLAGS=$(pkg-config --libs vkrdma) go run main.go 192.0.2.1 6379
//
// Errors come by a pointer and not by the thread, so that goroutines may move between threads.
package main

// #include <stdlib.h>
// #include <vkrdma.h>
import "C"

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"
)

// done returns what a call has failed with.
func done(code C.vkrdma_code, failed *C.vkrdma_error) error {
	if code == C.VKRDMA_OK {
		return nil
	}
	return errors.New(C.GoString(&failed.text[0]))
}

type client struct {
	device     *C.vkrdma_device
	endpoint   *C.vkrdma_endpoint
	connection C.uint64_t
}

// await sleeps until there is something new. What it is, the next call tells.
func (c *client) await() error {
	var failed C.vkrdma_error
	var event C.vkrdma_event
	var count C.size_t
	if err := done(C.vkrdma_wait(c.endpoint, -1, &failed), &failed); err != nil {
		return err
	}
	return done(C.vkrdma_progress(c.endpoint, &event, 1, C.sizeof_vkrdma_event, &count, &failed), &failed)
}

// again makes a call until it has an answer.
func (c *client) again(call func(failed *C.vkrdma_error) C.vkrdma_code) error {
	for {
		var failed C.vkrdma_error
		code := call(&failed)
		if code != C.VKRDMA_AGAIN {
			return done(code, &failed)
		}
		if err := c.await(); err != nil {
			return err
		}
	}
}

func dial(address string, port uint16) (*client, error) {
	var failed C.vkrdma_error
	c := &client{}
	text := C.CString(address)
	defer C.free(unsafe.Pointer(text))
	if err := done(C.vkrdma_verbs_open(&c.device, &failed), &failed); err != nil {
		return nil, err
	}
	if err := done(C.vkrdma_endpoint_new(c.device, nil, &c.endpoint, &failed), &failed); err != nil {
		return nil, err
	}
	code := C.vkrdma_connect(c.endpoint, text, C.uint16_t(port), nil, 5000000, nil, &c.connection, &failed)
	if err := done(code, &failed); err != nil {
		return nil, err
	}
	// Until bytes can flow.
	return c, c.again(func(failed *C.vkrdma_error) C.vkrdma_code {
		var status C.vkrdma_status
		if code := C.vkrdma_check(c.endpoint, c.connection, failed); code != C.VKRDMA_OK {
			return code
		}
		code := C.vkrdma_status_of(c.endpoint, c.connection, &status, C.sizeof_vkrdma_status, failed)
		if code == C.VKRDMA_OK && status.open == 0 {
			return C.VKRDMA_AGAIN
		}
		return code
	})
}

func (c *client) write(bytes []byte) error {
	for len(bytes) > 0 {
		var written C.size_t
		err := c.again(func(failed *C.vkrdma_error) C.vkrdma_code {
			return C.vkrdma_write(c.endpoint, c.connection, unsafe.Pointer(&bytes[0]), C.size_t(len(bytes)), &written, failed)
		})
		if err != nil {
			return err
		}
		bytes = bytes[written:]
	}
	return nil
}

// read returns how many bytes it has read; 0 is the end.
func (c *client) read(into []byte) (int, error) {
	var read C.size_t
	err := c.again(func(failed *C.vkrdma_error) C.vkrdma_code {
		return C.vkrdma_read(c.endpoint, c.connection, unsafe.Pointer(&into[0]), C.size_t(len(into)), &read, failed)
	})
	return int(read), err
}

func ping(address string, port uint16) error {
	c, err := dial(address, port)
	if err != nil {
		return err
	}
	defer C.vkrdma_device_free(c.device)
	defer C.vkrdma_endpoint_free(c.endpoint)
	if err := c.write([]byte("PING\r\n")); err != nil {
		return err
	}
	reply, said := make([]byte, 64), ""
	for !strings.HasSuffix(said, "\r\n") {
		read, err := c.read(reply)
		if err != nil {
			return err
		}
		if read == 0 {
			return errors.New("the server has closed the connection")
		}
		said += string(reply[:read])
	}
	fmt.Print("PING: ", said)
	return nil
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: go run main.go ADDRESS PORT")
		os.Exit(2)
	}
	port, err := strconv.ParseUint(os.Args[2], 10, 16)
	if err == nil {
		err = ping(os.Args[1], uint16(port))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

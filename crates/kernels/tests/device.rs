//! Every device does the same through one interface: the same bodies on the emulator and, where there is one, on a GPU.

use kernels::device::{Argument, Backend, Command, Device, DeviceError, Launch};

/// The devices of this machine. Without a GPU, or without code for one in this build, the emulator alone, and the reason is printed.
fn devices() -> Vec<Device> {
    let open = |backend| match Device::open(backend) {
        Ok(device) => Some(device),
        Err(DeviceError::Unavailable(reason)) => {
            println!("skipped on {backend:?}: {reason}");
            None
        }
        Err(error) => panic!("{backend:?}: {error}"),
    };
    let devices: Vec<Device> = [Backend::Emulated, Backend::Cuda].into_iter().filter_map(open).collect();
    assert!(cfg!(not(target_arch = "x86_64")) || !devices.is_empty(), "tests are built with the emulator");
    devices
}

fn words(device: &Device, name: &str, values: &[u32]) -> kernels::device::Buffer {
    let buffer = device.allocate(name, values.len() * 4).unwrap();
    buffer.write(0, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    buffer
}

fn read(buffer: &kernels::device::Buffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect()
}

/// y[block] += step, on four blocks.
fn count(y: &kernels::device::Buffer, step: u32) -> Launch {
    Launch {
        kernel: "probe_count",
        grid: [4, 1, 1],
        block: 256,
        shared_bytes: 0,
        cooperative: false,
        arguments: vec![y.at(0), Argument::U32(step)],
    }
}

#[test]
fn properties_are_those_of_something_that_can_run_kernels() {
    for device in devices() {
        let p = device.properties();
        assert!(!p.name.is_empty() && p.multiprocessors > 0 && p.l2_bytes > 1 << 20, "{p:?}");
        assert_eq!(p.shared_bytes, 99 << 10);
        assert_eq!(p.compute_capability.is_none(), p.emulated);
        assert!(p.compute_capability.is_none_or(|capability| capability >= (8, 0)));
    }
}

#[test]
fn streams_run_in_order_and_events_order_them() {
    for device in devices() {
        let (x, y) = (words(&device, "x", &[0; 4]), words(&device, "y", &[9; 4]));
        let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
        let begin = first.event().unwrap();
        first.fill(&x, 1).unwrap();
        for step in [1, 10, 100] {
            // SAFETY: four blocks, four words.
            unsafe { first.launch(&count(&x, step)) }.unwrap();
        }
        let end = first.event().unwrap();
        second.wait_for(&end).unwrap();
        let copy = Command::Copy { from: x.clone(), from_offset: 0, to: y.clone(), to_offset: 4, bytes: 12 };
        // SAFETY: a copy; the event orders it behind the writes.
        unsafe { second.enqueue(&copy) }.unwrap();
        second.synchronize().unwrap();
        assert!(begin.done().unwrap() && end.done().unwrap());
        let ms = end.ms_since(&begin).unwrap();
        assert_eq!(ms.is_none(), device.properties().emulated);
        assert!(ms.is_none_or(|ms| (0.0..10_000.0).contains(&ms)), "{ms:?} ms");
        let expected = 0x0101_0101 + 111;
        assert_eq!(read(&y), [9, expected, expected, expected]);
        first.synchronize().unwrap();
    }
}

#[test]
fn a_buffer_dropped_while_it_is_in_use_is_kept_until_then() {
    for device in devices() {
        let stream = device.stream().unwrap();
        let y = words(&device, "y", &[0; 4]);
        let kept = words(&device, "kept", &[0; 4]);
        for _ in 0..100 {
            // SAFETY: four blocks, four words.
            unsafe { stream.launch(&count(&y, 1)) }.unwrap();
        }
        let copy = Command::Copy { from: y.clone(), from_offset: 0, to: kept.clone(), to_offset: 0, bytes: 16 };
        // SAFETY: a copy on the stream that wrote.
        unsafe { stream.enqueue(&copy) }.unwrap();
        drop((y, copy));
        assert_eq!(read(&kept), [100; 4]);
    }
}

#[test]
fn a_graph_replays_launches_fills_and_copies_in_order() {
    for device in devices() {
        let (x, y) = (words(&device, "x", &[7; 4]), words(&device, "y", &[0; 8]));
        let commands = [
            Command::Fill { buffer: x.clone(), offset: 4, bytes: 8, byte: 0 },
            count(&x, 5).into(),
            Command::Copy { from: x.clone(), from_offset: 0, to: y.clone(), to_offset: 16, bytes: 16 },
            count(&y, 1).into(),
        ];
        // SAFETY: four blocks; both have four words or more.
        let graph = unsafe { device.record(commands) }.unwrap();
        assert_eq!((graph.launches(), graph.commands().len()), (2, 4));
        assert_eq!(read(&y), [0; 8], "recording runs nothing");
        graph.replay().unwrap();
        assert_eq!(read(&y), [1, 1, 1, 1, 12, 5, 5, 12]);
        let stream = device.stream().unwrap();
        stream.replay(&graph).unwrap();
        stream.replay(&graph).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(read(&y), [3, 3, 3, 3, 22, 5, 5, 22]);
        // The graph owns what it uses.
        drop(x);
        graph.replay().unwrap();
        assert_eq!(read(&y)[4..], [27, 5, 5, 27]);
    }
}

#[test]
fn an_empty_graph_can_be_replayed() {
    for device in devices() {
        // SAFETY: nothing is launched.
        let graph = unsafe { device.record::<Command>([]) }.unwrap();
        graph.replay().unwrap();
        assert_eq!(graph.launches(), 0);
    }
}

#[test]
fn kernels_and_copies_reach_pinned_memory() {
    for device in devices() {
        let ring = device.pinned("ring", 6).unwrap();
        assert_eq!(ring.words(), 6);
        assert!((0..6).all(|i| ring.load(i).unwrap() == 0), "it begins with zeros");
        let x = words(&device, "x", &[11, 22, 33]);
        let post = Launch {
            kernel: "probe_post",
            grid: [1, 1, 1],
            block: 32,
            shared_bytes: 0,
            cooperative: false,
            arguments: vec![x.at(0), ring.buffer().at(0), Argument::U32(3)],
        };
        // SAFETY: x has three words and the ring six.
        let graph = unsafe { device.record([post]) }.unwrap();
        let stream = device.stream().unwrap();
        stream.replay(&graph).unwrap();
        // Not waited for: the word in front says when the rest is there.
        while ring.load(0).unwrap() == 0 {
            std::hint::spin_loop();
        }
        assert_eq!([1, 2, 3].map(|i| ring.load(i).unwrap()), [11, 22, 33]);
        ring.store(5, 77).unwrap();
        let y = device.allocate("y", 8).unwrap();
        let copy =
            Command::Copy { from: ring.buffer().clone(), from_offset: 16, to: y.clone(), to_offset: 0, bytes: 8 };
        // SAFETY: a copy.
        unsafe { stream.enqueue(&copy) }.unwrap();
        stream.synchronize().unwrap();
        assert_eq!(read(&y), [0, 77]);
        assert!(matches!(ring.load(6), Err(DeviceError::Range { offset: 24, bytes: 4, .. })));
    }
}

#[test]
fn blocks_of_a_cooperative_launch_wait_for_each_other_in_a_graph_too() {
    for device in devices() {
        let (blocks, rounds) = (4, 5);
        let (state, barrier) = (words(&device, "state", &[0; 8]), words(&device, "barrier", &[0; 3]));
        let launch = Launch {
            kernel: "probe_barrier",
            grid: [blocks, 1, 1],
            block: 256,
            shared_bytes: 0,
            cooperative: true,
            arguments: vec![state.at(0), barrier.at(0), Argument::I32(rounds)],
        };
        // SAFETY: two words a block, and three.
        let graph = unsafe { device.record([launch]) }.unwrap();
        for _ in 0..3 {
            state.fill(0).unwrap();
            graph.replay().unwrap();
            assert_eq!(read(&state), [4, 4, 4, 4, 5, 5, 5, 5]);
            assert_eq!(read(&barrier), [0; 3], "the counters are zero again");
        }
    }
}

#[test]
fn failures_name_the_kernel_and_its_parameters() {
    for device in devices() {
        let y = words(&device, "y", &[0; 4]);
        let refused = |change: &dyn Fn(&mut Launch)| {
            let mut launch = count(&y, 3);
            change(&mut launch);
            // SAFETY: refused before it runs.
            unsafe { device.launch(&launch) }.unwrap_err().to_string()
        };
        let named = "probe_count<<<(4, 1, 1), 256, 0 bytes shared>>>(y[16], 3): ";
        assert!(refused(&|l| l.arguments[0] = y.at(20)).contains("(y[16] + 20, 3): offset 20 is past the end"));
        assert!(
            refused(&|l| l.kernel = "absent").starts_with("absent<<<(4, 1, 1), 256, 0 bytes shared>>>(y[16], 3): ")
        );
        assert!(refused(&|l| l.shared_bytes = 1 << 20).contains("at most 101376 bytes"));
        assert!(refused(&|l| l.grid[2] = 70_000).contains("65535 blocks across"));
        assert!(refused(&|l| l.block = 2048).contains("at most 1024 threads"));
        // A graph refuses when it is recorded, a stream when it is enqueued.
        let mut wide = count(&y, 3);
        wide.grid[0] = 0;
        // SAFETY: refused before it runs.
        let recorded = unsafe { device.record([wide.clone()]) }.err().unwrap().to_string();
        assert_eq!(
            recorded,
            format!("{}a grid or a block without threads, or with too many", named.replace("(4,", "(0,"))
        );
        let stream = device.stream().unwrap();
        // SAFETY: refused before it runs.
        assert_eq!(unsafe { stream.launch(&wide) }.unwrap_err().to_string(), recorded);
        let short = Command::Copy { from: y.clone(), from_offset: 8, to: y.clone(), to_offset: 0, bytes: 12 };
        // SAFETY: refused before it runs.
        let error = unsafe { stream.enqueue(&short) }.unwrap_err();
        assert!(matches!(error, DeviceError::Range { size: 16, offset: 8, bytes: 12, verb: "read", .. }), "{error}");
        let constant = device.constant("constant", &[0; 16]).unwrap();
        assert!(matches!(stream.fill(&constant, 1), Err(DeviceError::Range { constant: true, .. })));
    }
}

#[test]
fn what_belongs_to_another_device_is_refused() {
    let (Ok(one), Ok(other)) = (Device::open(Backend::Emulated), Device::open(Backend::Emulated)) else { return };
    let y = words(&one, "y", &[0; 4]);
    let stream = other.stream().unwrap();
    assert!(stream.fill(&y, 0).unwrap_err().to_string().contains("y belongs to another device"));
    // SAFETY: four blocks, four words.
    let graph = unsafe { one.record([count(&y, 1)]) }.unwrap();
    assert!(stream.replay(&graph).unwrap_err().to_string().contains("recorded on another device"));
    let event = one.stream().unwrap().event().unwrap();
    assert!(stream.wait_for(&event).unwrap_err().to_string().contains("another device"));
}

#[test]
fn a_fault_on_a_stream_names_its_kernel() {
    let Ok(device) = Device::open(Backend::Emulated) else { return };
    // Three words for four blocks: the emulator sees what a GPU would not.
    let y = words(&device, "y", &[0; 3]);
    let stream = device.stream().unwrap();
    // SAFETY: a checked emulated device makes the mistake an error.
    let error = unsafe { stream.launch(&count(&y, 3)) }.unwrap_err().to_string();
    assert!(
        error.starts_with("probe_count<<<(4, 1, 1), 256, 0 bytes shared>>>(y[12], 3): the emulator found\n"),
        "{error}"
    );
    assert!(error.contains("OUT-OF-BOUNDS"), "{error}");
}

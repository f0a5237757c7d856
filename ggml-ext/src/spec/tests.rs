use super::registry::{self, SPEC_BASE, SPEC_LIMIT};
use super::*;
use proptest::prelude::*;

fn layer(index: usize, n_layer: usize, sliding: bool) -> Layer {
    Layer { index, n_layer, head_size: 64, sliding }
}

/// The names of all layers of a model whose odd layers have a window.
fn types(text: &str, n_layer: usize) -> Vec<String> {
    let spec = parse(text).unwrap();
    (0..n_layer).map(|i| spec.member(&layer(i, n_layer, i % 2 == 1)).0.name()).collect()
}

fn bad(text: &str) -> (usize, String) {
    let e = parse(text).expect_err(text);
    (e.at, e.reason)
}

#[test]
fn layers_get_what_is_said_of_them() {
    assert_eq!(types("srft4", 3), ["srft4"; 3]);
    assert_eq!(types("srft4,0-1=srft8,-1=f16", 4), ["srft8", "srft8", "srft4", "f16"]);
    assert_eq!(types("srft4,-2--1=q8_0", 3), ["srft4", "q8_0", "q8_0"]);
    assert_eq!(types("srft4,1--2=srft3", 4), ["srft4", "srft3", "srft3", "srft4"]);
    assert_eq!(types("srft8,swa=srft4", 4), ["srft8", "srft4", "srft8", "srft4"]);
    assert_eq!(types(" srft4 , 0 - 1 = srft8 ", 3), ["srft8", "srft8", "srft4"]);
}

#[test]
fn a_number_beats_the_window_and_the_last_range_counts() {
    assert_eq!(types("srft8,1=f16,swa=srft4", 4), ["srft8", "f16", "srft8", "srft4"]);
    assert_eq!(types("f16,0-3=srft4,2=srft8", 4), ["srft4", "srft4", "srft8", "srft4"]);
    assert_eq!(types("f16,2=srft8,0-3=srft4", 4), ["srft4"; 4]);
    let spec = parse("srft8,1=f16,swa=srft4").unwrap();
    assert!(spec.member(&layer(1, 4, true)).1 && !spec.member(&layer(3, 4, true)).1);
}

#[test]
fn the_guard_is_on_unless_it_is_off() {
    for (text, on) in
        [("srft4", true), ("srft4,guard=on", true), ("srft4,guard=off", false), ("f16,0=srft4,guard=off", false)]
    {
        assert_eq!(parse(text).unwrap().guard, on, "{text}");
    }
}

#[test]
fn recent_cells_are_a_number() {
    for (text, cells) in [("srft4", None), ("srft4,recent=0", Some(0)), ("srft4, recent = 64 ,0=f16", Some(64))] {
        let spec = parse(text).unwrap();
        assert_eq!((spec.recent, spec.alone().is_some()), (cells, cells.is_none()), "{text}");
    }
    for value in ["", "-1", "+5", "many", "65537", "99999999999"] {
        let (at, reason) = bad(&format!("srft4,recent={value}"));
        assert!(at == 13 && reason.starts_with("recent is a number of cells"), "{value}: {at} {reason}");
    }
    assert_eq!(bad("srft4,recent=1,recent=2"), (15, "recent is given twice".into()));
    let idle = |text: &str| parse(text).unwrap().idle_parts(&[Keeps::All]).join("; ");
    assert!(idle("srft8,recent=64").starts_with("recent=64 does nothing by itself"), "{}", idle("srft8,recent=64"));
    assert_eq!(idle("srft4,recent=64") + &idle("srft8,recent=0"), "");
}

#[test]
fn a_calibration_is_a_file_for_keys() {
    for (text, file) in
        [("srft4", None), ("f16, cal = a/b c.gguf ", Some("a/b c.gguf")), ("srft4,cal=x=y,0=f16", Some("x=y"))]
    {
        let spec = parse(text).unwrap();
        assert_eq!((spec.calibration.as_deref(), spec.alone().is_some()), (file, file.is_none()), "{text}");
    }
    assert_eq!(bad("srft4,cal=").0, 10);
    assert_eq!(bad("srft4,cal=a,cal=b"), (12, "cal is given twice".into()));
    let (at, reason) = bad("srft4,cal=a,b.gguf");
    assert!(at == 12 && reason.contains("cannot have a comma"), "{at} {reason}");
    assert_eq!(parse("srft4,cal=x").unwrap().check(Side::K, 4), Ok(()));
    assert!(parse("srft4,cal=x").unwrap().check(Side::V, 4).unwrap_err().contains("cal=x is said of keys"));
}

#[test]
fn a_bad_spec_says_where() {
    assert_eq!(bad("").0, 0);
    assert_eq!(bad("srft9"), (0, "no cache type 'srft9'".into()));
    assert_eq!(bad("srft4,0-1=srft9").0, 10);
    assert_eq!(bad("srft4,,0=f16").0, 6);
    assert_eq!(bad("srft4,0=f16,").0, 12);
    assert_eq!(bad("srft4,srft8").0, 6);
    assert!(bad("srft4,srft8").1.contains("LAYERS=srft8"));
    assert_eq!(bad("srft4,x=srft8").0, 6);
    assert_eq!(bad("srft4,2-1=srft8").0, 6);
    assert_eq!(bad("srft4,-1--2=srft8").0, 6);
    assert_eq!(bad("srft4,0-=srft8").0, 8);
    assert_eq!(bad("srft4,+1=srft8").0, 6);
    assert_eq!(bad("srft4,99999999999=srft8").0, 6);
    assert_eq!(bad("srft4, swa=f16, swa=f16").0, 16);
    assert_eq!(bad("srft4,guard=maybe").0, 12);
    assert_eq!(bad("srft4,guard=off,guard=off").0, 16);
    assert_eq!(bad("srft4,0=").0, 8);
    assert_eq!(bad("é,x").0, 0);
    assert_eq!(bad("srft4,é=f16,q").0, 6);
}

#[test]
fn the_message_points_and_lists() {
    let text = parse("srft4,0-1=srft9").unwrap_err().to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[1], "    srft4,0-1=srft9");
    assert_eq!(lines[2], "              ^");
    assert!(text.contains("character 11") && text.contains("srft8, srft4") && text.contains("q8_0"), "{text}");
    // A terminal's own signs do not get through.
    assert!(!parse("srft4,\x1b[2J=f16").unwrap_err().to_string().contains('\x1b'));
}

#[test]
fn ranges_beyond_the_model_are_named() {
    let spec = parse("srft4,0-1=srft8,27=f16").unwrap();
    assert_eq!(spec.check(Side::K, 28), Ok(()));
    let e = spec.check(Side::K, 24).unwrap_err();
    assert!(e.contains("27=f16") && e.contains("0 to 23") && e.contains("srft4,0-1=srft8,27=f16"), "{e}");
    assert!(parse("srft4,-25=f16").unwrap().check(Side::K, 24).unwrap_err().contains("no layer -25"));
    assert!(parse("srft4,-24=f16").unwrap().check(Side::V, 24).is_ok());
    let e = parse("srft4,5--6=f16").unwrap().check(Side::V, 8).unwrap_err();
    assert!(e.contains("5--6=f16") && e.contains("ends before it begins"), "{e}");
    assert!(parse("srft4,0=f16").unwrap().check(Side::V, 0).is_err());
}

#[test]
fn members_resolve_to_types_of_the_head_size() {
    let id = |name: &str, head_size| {
        Member::by_name(name).unwrap().resolve(Side::K, &Layer { index: 7, n_layer: 8, head_size, sliding: false })
    };
    assert_eq!(id("srft4", 64), Ok(144));
    assert_eq!(id("srft4_64", 64), Ok(144));
    assert_eq!(id("q8_0", 64), Ok(8));
    assert_eq!(id("f16", 80), Ok(1));
    for (name, size) in [("srft4_64", 128), ("srft4", 72), ("q8_0", 80), ("srft4", 0)] {
        let e = id(name, size).unwrap_err();
        assert!(e.contains("layer 7") && e.contains(name) && e.contains(&size.to_string()), "{e}");
    }
}

#[test]
fn one_type_alone_is_that_type_and_the_rest_have_ids_of_their_own() {
    assert_eq!(registry::id_of("srft4"), Ok(159));
    assert_eq!(registry::id_of("srft4_64"), Ok(144));
    assert_eq!(registry::id_of("srft4,guard=on"), Ok(159));
    assert_eq!(registry::id_of("q8_0"), Ok(8));
    let id = registry::id_of("srft4,0=f16").unwrap();
    assert!((SPEC_BASE..SPEC_LIMIT).contains(&id));
    assert_eq!(registry::id_of(" srft4,0=f16 "), Ok(id), "the same text has the same id");
    assert_ne!(registry::id_of("srft4,1=f16"), Ok(id));
    assert_ne!(registry::id_of("srft4,guard=off"), Ok(159));
    assert_eq!(registry::by_id(id).unwrap().text(), "srft4,0=f16");
    for none in [i32::MIN, -1, 0, 144, 159, SPEC_BASE - 1, SPEC_LIMIT, i32::MAX] {
        assert!(registry::by_id(none).is_none(), "{none}");
    }
}

#[test]
fn threads_agree_on_ids() {
    let texts: Vec<String> = (0..50).map(|i| format!("srft3,{i}=f16")).collect();
    let ids = || texts.iter().map(|t| registry::id_of(t).unwrap()).collect::<Vec<_>>();
    let all: Vec<Vec<i32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ids)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (text, id) in texts.iter().zip(&all[0]) {
        assert_eq!(registry::by_id(*id).unwrap().text(), text);
    }
    assert!(all.iter().all(|ids| *ids == all[0]));
}

#[test]
fn ids_do_not_meet() {
    for c in table::concrete() {
        assert!(c.id() < SPEC_BASE);
    }
    assert!(table::families().iter().all(|f| f.id() < SPEC_BASE));
    assert!(NATIVE.iter().all(|p| p.id < table::ID_BASE));
}

#[test]
fn what_names_nothing_is_told() {
    use Keeps::{All, Nothing, Window};
    let idle = |text: &str, layers: &[Keeps]| parse(text).unwrap().idle_parts(layers);
    let shared = [All, Window, All, Nothing];
    for text in ["srft4", "srft4,0=f16,swa=srft3", "srft4,2-3=f16", "srft4,-4=f16,guard=off"] {
        assert!(idle(text, &shared).is_empty(), "{text}");
    }
    let told = idle("srft4,-1=f16,0=f16,3=srft8", &shared);
    assert_eq!(told.len(), 2);
    assert!(told[0].starts_with("-1=f16 does nothing") && told[1].starts_with("3=srft8 does nothing"), "{told:?}");
    let told = idle("srft4,swa=srft3", &[All, Nothing]);
    assert!(told.len() == 1 && told[0].contains("swa=srft3") && told[0].contains("no layer has a sliding window"));
}

#[test]
fn a_long_spec_leaves_room_for_the_reason() {
    let layers: String = (0..400).map(|i| format!(",{i}=srft8")).collect();
    let e = parse(&format!("srft4{layers}")).unwrap().check(Side::K, 399).unwrap_err();
    assert!(e.len() < 300 && e.contains("srft4,0=srft8") && e.contains("no layer 399"), "{e}");
}

/// A spec as text and, worked out another way, what it means for each layer of a model with 12.
fn written() -> impl Strategy<Value = (String, Vec<String>)> {
    let names = prop::sample::select(vec!["srft8", "srft4", "srft3", "f16", "q8_0", "q4_0", "iq4_nl"]);
    let item = (0..12usize, 0..12usize, any::<bool>(), any::<bool>(), names.clone());
    (names.clone(), prop::collection::vec(item, 0..6), prop::option::of(names)).prop_map(|(default, items, swa)| {
        let mut text = default.to_string();
        let mut layers: Vec<String> =
            (0..12).map(|i| if i % 2 == 1 { swa.unwrap_or(default) } else { default }.into()).collect();
        if let Some(swa) = swa {
            text += &format!(",swa={swa}");
        }
        for (a, b, from_end_a, from_end_b, name) in items {
            let (a, b) = (a.min(b), a.max(b));
            let shown = |x: usize, from_end: bool| if from_end { x as i64 - 12 } else { x as i64 };
            text += &format!(",{}-{}={name}", shown(a, from_end_a), shown(b, from_end_b));
            layers[a..=b].fill(name.to_string());
        }
        (text, layers)
    })
}

proptest! {
    #[test]
    fn any_spec_means_what_it_says((text, want) in written()) {
        prop_assert_eq!(parse(&text).unwrap().check(Side::K, 12), Ok(()));
        prop_assert_eq!(types(&text, 12), want);
    }

    #[test]
    fn any_text_is_read_or_refused_where_it_is_bad(text in "\\PC{0,40}|[srft48=,0-9swaguardof \\-]{0,40}") {
        match parse(&text) {
            Ok(spec) => prop_assert_eq!(spec.text(), text.trim()),
            Err(e) => {
                prop_assert!(e.at <= text.chars().count());
                prop_assert!(e.to_string().contains("srft4"));
            }
        }
    }

    #[test]
    fn any_bytes_cross_the_boundary(bytes in prop::collection::vec(1u8.., 0..60), room in 0usize..80) {
        let text = std::ffi::CString::new(bytes).unwrap();
        let mut err = vec![0x7fu8; room + 1];
        // SAFETY: a C string, and room as said.
        let id = unsafe { crate::ffi::ggml_ext_type_parse(text.as_ptr(), err.as_mut_ptr().cast(), room) };
        prop_assert!(id == -1 || Member::by_id(id).is_some() || registry::by_id(id).is_some());
        prop_assert_eq!(err[room], 0x7f, "nothing is written beyond the room");
        prop_assert!(id >= 0 || room == 0 || err[..room].contains(&0));
    }

    #[test]
    fn layers_of_any_model_are_answered(index in any::<usize>(), n_layer in any::<usize>(), sliding in any::<bool>()) {
        let spec = parse("srft4,0-1=srft8,-3--1=f16,swa=q8_0").unwrap();
        let _ = spec.check(Side::V, n_layer);
        let _ = spec.member(&layer(index, n_layer, sliding));
    }
}

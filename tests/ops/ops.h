// What kv-test-ops tests, a file each.
#pragma once

#include "../harness/graph.h"
#include "../harness/harness.h"
#include "../harness/random.h"

void test_accessors();
void test_spec();
void test_rows();
void test_groups();
void test_attention();
void test_mul_mat();
void test_together();
void test_canary();
void test_refusal();
void test_crafted();

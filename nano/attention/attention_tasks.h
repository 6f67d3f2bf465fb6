// How the attention of one step is cut into tasks. Cuts change no bit of any result: rows do not meet,
// and what a row gathers in several ranges is merged in ascending order by whoever does it.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_rows.h"

constexpr long TILE_ROWS = 48;        // about as many rows share the keys that one task reads
constexpr long ROWS_OF_READING = 8;   // reading a range of keys and values takes as long as so many rows
constexpr long TASKS_PER_THREAD = 4;  // at least, where work can be cut so

// Query tokens of one request that share a pass over its keys. With a KV head they make rows: one for
// each token and query head of the head's group, in this order.
struct Tile {
  long request, first_token, num_tokens;
  long first_position;  // of first_token in its sequence
  long group;           // query heads of a KV head

  long num_rows() const { return num_tokens * group; }
  long last_position(long row) const { return first_position + row / group; }  // that the row sees
  long first_row_that_sees(long position) const {
    return std::max(0L, position - first_position) * group;
  }
  long num_ranges() const { return (first_position + num_tokens - 1) / RANGE + 1; }
  long cost_of_range() const { return num_rows() + ROWS_OF_READING; }
};

// One task, for each KV head: a tile over the ranges [first_range, end_range).
struct Piece {
  Tile tile;
  long first_range, end_range;
  long split;  // the Split that it belongs to; -1: it is all of its tile
};

// A tile of several pieces. The state of every range is kept; who finishes last merges them.
struct Split {
  long num_pieces;
  long first_state;  // place in Tasks::states_size of the states, [KVH][ranges]
};

static inline long aligned(long num_floats) { return (num_floats + 15) / 16 * 16; }

static inline long state_size(long num_rows, long dim) {
  return aligned(num_rows * dim) + 2 * aligned(num_rows);
}

static inline State state_at(float* memory, long num_rows, long dim) {
  float* best = memory + aligned(num_rows * dim);
  return {best, best + aligned(num_rows), memory};
}

struct Tasks {
  std::vector<Piece> pieces;
  std::vector<Split> splits;
  long states_size = 0;  // floats that the states of all splits need
};

// query_start: [R + 1]; seq_lens: [R].
static inline std::vector<Tile> make_tiles(const int32_t* query_start, const int32_t* seq_lens,
                                           long num_requests, long group) {
  const long num_tokens = std::max(1L, TILE_ROWS / group);
  std::vector<Tile> tiles;
  for (long r = num_requests - 1; r >= 0; r--) {  // long queries come last in a batch: start with them
    const long start = query_start[r], end = query_start[r + 1];
    for (long token = start; token < end; token += num_tokens)
      tiles.push_back(
          {r, token, std::min(num_tokens, end - token), seq_lens[r] - (end - token), group});
  }
  return tiles;
}

// Tiles as they are; those that would keep one of several threads busy for too long, by ranges.
static inline Tasks make_tasks(const std::vector<Tile>& tiles, long kv_heads, long dim, long num_threads) {
  long total = 0;
  for (const Tile& tile : tiles) total += tile.num_ranges() * tile.cost_of_range() * kv_heads;
  const long most = num_threads == 1 ? total : total / (num_threads * TASKS_PER_THREAD);
  Tasks tasks;
  for (const Tile& tile : tiles) {
    const long num_ranges = tile.num_ranges();
    const long ranges_of_piece = std::max(1L, most / tile.cost_of_range());
    const long num_pieces = (num_ranges + ranges_of_piece - 1) / ranges_of_piece;
    const long split = num_pieces > 1 ? (long)tasks.splits.size() : -1;
    for (long i = 0; i < num_pieces; i++)
      tasks.pieces.push_back(
          {tile, num_ranges * i / num_pieces, num_ranges * (i + 1) / num_pieces, split});
    if (num_pieces == 1) continue;
    tasks.splits.push_back({num_pieces, tasks.states_size});
    tasks.states_size += kv_heads * num_ranges * state_size(tile.num_rows(), dim);
  }
  return tasks;
}

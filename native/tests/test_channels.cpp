// The choice of channels between ranks.

#include <set>
#include <vector>

#include "check.hpp"
#include "device/channels.hpp"

using namespace sealring;

TEST(in_a_small_group_no_two_messages_of_a_rank_share_a_channel) {
  for (int world = 2; world <= 4; ++world) {
    const Channels channels(world);
    for (int rank = 0; rank < world; ++rank) {
      std::set<size_t> used;
      for (int peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        used.insert(channels.of(rank, peer));
        used.insert(channels.of(peer, rank));
      }
      CHECK_NOTE(used.size() == 2 * static_cast<size_t>(world - 1), "rank %d of %d", rank, world);
      CHECK(*used.rbegin() < channels.count());
    }
  }
}

TEST(a_group_has_as_many_channels_as_it_needs) {
  CHECK(Channels(2).count() == 2);
  CHECK(Channels(3).count() == 6);
  CHECK(Channels(4).count() == 6);
}

TEST(a_larger_group_shares_channels_evenly) {
  for (int world : {5, 8, 16, 64}) {
    const Channels channels(world);
    CHECK(channels.count() == 2 * static_cast<size_t>(Channels::kMostPairings));
    for (int rank = 0; rank < world; ++rank) {
      std::vector<int> messages(channels.count());
      for (int peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        ++messages.at(channels.of(rank, peer));
        ++messages.at(channels.of(peer, rank));
      }
      for (size_t i = 0; i < messages.size(); i += 2) {
        const int pairs = (messages[i] + messages[i + 1]) / 2;
        CHECK_NOTE(pairs <= world / Channels::kMostPairings + 1, "rank %d of %d", rank, world);
      }
    }
  }
}

int main(int argc, char** argv) { return sealring::testing::run(argc, argv); }
